"""Tests of fastclip.monitor.batch."""
