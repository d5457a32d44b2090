"""How the Hopper kernels cut their GEMMs: a rule, and tables that were measured."""
