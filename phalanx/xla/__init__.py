"""The second engine: the same run file, models and layouts on XLA, through JAX."""
