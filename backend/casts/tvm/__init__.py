"""The compiled casts as programs in TVM's script."""
