"""How a piece runs: shells, layouts, norm statistics, ensembles, switching."""
