"""Frozen video classifiers behind one interface."""
