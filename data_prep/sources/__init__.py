"""One file for each layout in which a corpus may lie around."""
