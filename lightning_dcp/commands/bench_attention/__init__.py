"""`lightning-dcp bench attention`: attention over a group against one rank's kernel."""
