"""Test other libraries' training loops on planned models, on two real ranks: cases and waiting."""
