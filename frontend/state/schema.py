"""The tables of the state: one SQLite file in the state folder, or in the run directory if there is none."""

from __future__ import annotations

FILE = "state.sqlite"
VERSION = 1  # of the tables, as user_version; a file with a higher one is refused

TABLES = """
CREATE TABLE IF NOT EXISTS clock (id INTEGER PRIMARY KEY CHECK (id = 0), boot TEXT, start REAL, seen REAL);

CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, created REAL, owner INT, is_open INT, is_background INT,
    items BLOB, request BLOB, response BLOB,
    event_bytes INT DEFAULT 0,
    num_bytes INT AS (length(items) + length(request) + length(response) + event_bytes) STORED
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (is_open, created, num_bytes);
CREATE TABLE IF NOT EXISTS events (
    id TEXT REFERENCES responses ON DELETE CASCADE, sequence INT, event BLOB, PRIMARY KEY (id, sequence)
);

CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner BLOB, is_open INT, status TEXT, input_file_id TEXT, record BLOB
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, is_open);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (is_open, status);
CREATE TABLE IF NOT EXISTS lines (
    batch INT REFERENCES batches (number), number INT, offset INT, length INT, custom_id TEXT,
    state INT DEFAULT 0, opened REAL, losses INT DEFAULT 0, seed INT DEFAULT 0, num_cached INT DEFAULT 0,
    tokens BLOB DEFAULT x'', status INT, answer BLOB,
    PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)
);
CREATE INDEX IF NOT EXISTS lines_by_state ON lines (batch, state, number);

CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, owner BLOB, num_bytes INT, created_at INT, expires_at INT,
    expires REAL, filename TEXT, purpose TEXT
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, number, num_bytes);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (expires);
"""
