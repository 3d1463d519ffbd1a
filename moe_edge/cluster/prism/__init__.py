"""Prism (collaborative inference): servers, placement judged and migrated live."""
