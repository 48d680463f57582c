"""The engine `xla`: the whole function as one program of JAX/XLA. Importing this loads no JAX."""
