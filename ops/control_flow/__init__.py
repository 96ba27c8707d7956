"""If, Loop, Scan, SequenceMap and operators on sequences: what their operands must satisfy."""
