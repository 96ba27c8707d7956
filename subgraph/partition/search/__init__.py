"""The search for regions: algorithms on arrays of integers that know nothing of operators."""
