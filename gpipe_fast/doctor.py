"""``python -m gpipe_fast.doctor`` prints what `gpipe_fast.doctor` says of the machine."""

from gpipe_fast.diagnosis import doctor

if __name__ == "__main__":
    print(doctor())
