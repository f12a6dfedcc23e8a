"""The commands of ``lightning-dcp`` beside Lightning's own: each is a function whose arguments are the options."""
