"""Transfer costs and sensitivities of a small model to the grown one."""
