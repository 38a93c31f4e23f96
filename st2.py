import gc,sys,runpy,resource
if sys.argv[1]=="0": gc.disable()
sys.argv=["train"]+sys.argv[2:]
try: runpy.run_module("tfdist.train", run_name="__main__")
except SystemExit: pass
r=resource.getrusage(resource.RUSAGE_SELF); print("CPU",round(r.ru_utime+r.ru_stime,2),file=sys.stderr)
