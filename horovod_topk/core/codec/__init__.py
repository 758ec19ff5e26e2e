"""Encodes residual plus gradient into payloads, decodes payloads, and measures and clips."""
