"""Signal processing: DFT, STFT, windows and mel filters."""
