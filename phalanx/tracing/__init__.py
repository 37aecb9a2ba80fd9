"""What a module computes, read from its own graph: how tensor parallelism can divide it, and where positions meet."""
