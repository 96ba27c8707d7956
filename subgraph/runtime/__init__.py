"""Running graphs: the default executor, compiled models and their requests."""
