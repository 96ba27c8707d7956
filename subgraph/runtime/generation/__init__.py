"""GreedySearch, Sampling, BeamSearch and WhisperBeamSearch: loops that call their bodies."""
