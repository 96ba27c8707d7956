"""Views and operators that move elements; layouts and packed weights, too."""
