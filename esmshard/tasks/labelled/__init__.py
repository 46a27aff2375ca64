"""Labels of residues, of whole proteins and of pairs of them: tasks, heads, and what both know of classes."""
