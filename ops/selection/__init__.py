"""Operators that find how much they give: TopK, NonZero, Unique, NonMaxSuppression, Compress."""
