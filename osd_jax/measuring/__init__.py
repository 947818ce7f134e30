"""What a run is worth: metrics, the certificate, alarms, tables in plain words."""
