"""Real ranks: who they are, what they agree on, and how their steps are measured and watched."""
