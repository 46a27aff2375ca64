"""Tables of measured variants of one protein: substitutions as laboratories write them, and their numbering."""
