"""Recipes, the DeepSpeed JSON and the errors of wrong input; needs no torch."""
