"""Adapters for other libraries, one module each. Nothing here is imported by `flashattn_ext`."""
