"""Models in the terms of each library: its graphs, compiled forms, runs, and the card."""
