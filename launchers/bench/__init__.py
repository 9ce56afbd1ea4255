"""The parts of `vitscale bench data`: cases in processes of their own, the order alone, tables."""
