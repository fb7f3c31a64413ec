"""The paper's tables and figures by one command."""
