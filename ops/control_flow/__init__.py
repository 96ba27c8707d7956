"""If, Loop, Scan, SequenceMap and operators on sequences and optionals."""
