"""Model families: short files of plain torch modules built from shared layers."""
