"""Model classes, and how their weights are found and loaded."""
