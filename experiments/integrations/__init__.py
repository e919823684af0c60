"""Training loops of other libraries around planned models, on two real ranks: cases and waiting."""
