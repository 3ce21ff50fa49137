"""Weight files: what is published where, which of it is on this machine, and how to get the rest."""

from gpen_weights.download import pull
from gpen_weights.entries import Entry, GeneratorFacts, catalog, find
from gpen_weights.lookup import (
    DEFAULT_GENERATOR,
    Presence,
    default_detector,
    find_restorers,
    list_entries,
    resolve,
    search_folders,
    storage_folder,
)

__all__ = [
    "DEFAULT_GENERATOR",
    "Entry",
    "GeneratorFacts",
    "Presence",
    "catalog",
    "default_detector",
    "find",
    "find_restorers",
    "list_entries",
    "pull",
    "resolve",
    "search_folders",
    "storage_folder",
]
