"""Attention, linear attention, rotary embeddings and the caches of decoders."""
