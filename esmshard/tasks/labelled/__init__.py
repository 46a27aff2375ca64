"""Labels of residues and of whole proteins: tasks, heads, and what both know of classes."""
