"""The artifact: schema, writer, reader, checksums. Does not depend on any model."""
