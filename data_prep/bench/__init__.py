"""The parts of `vitscale bench`: cases in processes of their own, rounds, tables."""
