"""What users and drivers test with: the conformance suite of a driver, and faults for any bus. No pytest inside."""
