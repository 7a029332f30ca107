"""The artifact: schema, writer, reader, checksums. Knows no torch model."""
