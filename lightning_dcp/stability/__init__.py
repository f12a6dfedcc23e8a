"""How steady steps are: what is measured of them, alarms, and what is done about slow links and ranks."""
