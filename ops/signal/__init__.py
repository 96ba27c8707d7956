"""DFT and STFT."""
