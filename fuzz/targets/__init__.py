"""The targets: one module each, named after what reads the bytes."""
