"""Engines and tools of others that can run this package's work. Each is imported only when it is asked for."""
