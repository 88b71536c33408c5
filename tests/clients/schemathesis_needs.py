"""What `tests/fuzz_server.py --schemathesis` installs."""

# needs: schemathesis==4.32.5
