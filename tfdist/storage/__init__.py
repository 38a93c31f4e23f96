"""Object stores and HDFS: a few operations on objects below a URL, leases in a store, copies of folders in a store."""
