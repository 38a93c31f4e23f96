"""Object stores and HDFS: a few operations on objects below a URL, a lease there, a folder's copy there."""
