"""Random numbers, and draws by probabilities."""
