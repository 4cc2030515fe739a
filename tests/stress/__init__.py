"""Everything at once, at random moments."""
