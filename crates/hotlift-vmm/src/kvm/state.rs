//! A vCPU's state: read from KVM, written to KVM, and its wire format.
//!
//! The fields are KVM's structures in the kernel's x86-64 layout. They belong to the device `hotlift/vcpu` (see
//! [`crate::device`]):
//!
//! | tag | field | bytes |
//! |---|---|---|
//! | 1 | `kvm_regs` | 144 |
//! | 2 | `kvm_sregs` | 312 |
//! | 3 | `kvm_xsave` | size from `KVM_CAP_XSAVE2`, at least 4096 |
//! | 4 | `kvm_xcrs` | 392 |
//! | 5 | `kvm_debugregs` | 128 |
//! | 6 | `kvm_vcpu_events` | 64 |
//! | 7 | `kvm_mp_state` | 4 |
//! | 8 | MSRs | 12 each: be32 index, be64 value |
//! | 9 | begun serial line | 0 to 256 |
//!
//! The kernel checks the values. If the kernel rejects a field, the error names it. Local APIC and clock are absent:
//! the guest has no interrupt controller and reads no paravirtual clock.

use hotlift::guest::DeviceState;
use kvm_bindings::{
    Msrs, Xsave, kvm_debugregs, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs,
};
use kvm_ioctls::VcpuFd;

use super::error::KvmError;
use crate::device::{DeviceError, FieldWriter, Fields};

/// Name of a vCPU's device; the version follows.
pub(super) const VCPU: &str = "hotlift/vcpu";
pub(super) const VCPU_VERSION: u32 = 1;

const REGS: u32 = 1;
const SREGS: u32 = 2;
const XSAVE: u32 = 3;
const XCRS: u32 = 4;
const DEBUGREGS: u32 = 5;
const EVENTS: u32 = 6;
const MP_STATE: u32 = 7;
const MSRS: u32 = 8;
const SERIAL: u32 = 9;

/// Maximum length of an incomplete line on the guest's serial port, in bytes; a longer line is split.
pub(super) const MAX_LINE: usize = 256;

/// Maximum number of MSRs in a vCPU's state: KVM's limit for one call (`KVM_MAX_MSR_ENTRIES`).
const MAX_MSRS: usize = 256;

const MSR_TSC: u32 = 0x10;
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// A structure of numbers and arrays of numbers without padding, so that any bytes are a valid value.
///
/// # Safety
/// The type must be a structure of numbers and arrays of numbers without padding.
unsafe trait Plain: Copy + Default {
    fn to_bytes(&self) -> &[u8] {
        // SAFETY: a value without padding has only initialised bytes, and it is borrowed for the result's lifetime.
        unsafe { std::slice::from_raw_parts((&raw const *self).cast(), size_of::<Self>()) }
    }

    fn from_bytes(
        fields: &mut Fields<'_>,
        tag: u32,
        field: &'static str,
    ) -> Result<Self, DeviceError> {
        let bytes = fields.take(tag, field)?;
        if bytes.len() != size_of::<Self>() {
            return Err(fields.wrong_length(field, size_of::<Self>(), bytes.len()));
        }
        // SAFETY: the slice has the type's size, and any bytes are a value; the read needs no alignment.
        Ok(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

// SAFETY: like all types here, this is a kernel ABI structure of integers with explicit padding fields. The sizes,
// which are checked below, equal the sums of their fields.
unsafe impl Plain for kvm_regs {}
// SAFETY: see above.
unsafe impl Plain for kvm_sregs {}
// SAFETY: see above.
unsafe impl Plain for kvm_xcrs {}
// SAFETY: see above.
unsafe impl Plain for kvm_debugregs {}
// SAFETY: see above.
unsafe impl Plain for kvm_vcpu_events {}
// SAFETY: see above.
unsafe impl Plain for kvm_mp_state {}

const _: () = {
    assert!(size_of::<kvm_regs>() == 144);
    assert!(size_of::<kvm_sregs>() == 312);
    assert!(size_of::<kvm_xcrs>() == 392);
    assert!(size_of::<kvm_debugregs>() == 128);
    assert!(size_of::<kvm_vcpu_events>() == 64);
    assert!(size_of::<kvm_mp_state>() == 4);
};

/// Properties that all vCPUs of a VM share.
#[derive(Debug, Clone)]
pub(super) struct Model {
    /// Length of `kvm_xsave`, in bytes, at least 4096.
    pub xsave_len: usize,
    /// Indices of the MSRs that can be read and written back.
    pub msrs: Vec<u32>,
}

impl Model {
    /// Selects the entries of `listed` that can be read and written back on `vcpu`. The vCPU must not have run.
    pub fn new(vcpu: &VcpuFd, xsave_len: usize, listed: &[u32]) -> Self {
        let carried = |&index: &u32| {
            let Ok(mut one) = msr_list(&[(index, 0)]) else {
                return false;
            };
            vcpu.get_msrs(&mut one).is_ok_and(|got| got == 1)
                && vcpu.set_msrs(&one).is_ok_and(|set| set == 1)
        };
        let mut msrs: Vec<u32> = listed
            .iter()
            .copied()
            .filter(carried)
            .take(MAX_MSRS)
            .collect();
        // The TSC deadline is compared with the TSC, so it is written after the TSC. Both are last, so that the guest's
        // clock loses little time.
        msrs.sort_by_key(|&index| match index {
            MSR_TSC => 1,
            MSR_TSC_DEADLINE => 2,
            _ => 0,
        });
        Self {
            xsave_len: xsave_len.max(4096),
            msrs,
        }
    }

    fn xsave(&self) -> Xsave {
        Xsave::new((self.xsave_len - 4096).div_ceil(4)).expect("some KiB are not too many")
    }
}

fn msr_list(entries: &[(u32, u64)]) -> Result<Msrs, DeviceError> {
    let entries: Vec<_> = entries
        .iter()
        .map(|&(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    Msrs::from_entries(&entries).map_err(|_| DeviceError::OutOfRange {
        idstr: VCPU,
        field: "number of MSRs",
        got: crate::bytes::to_u64(entries.len()),
    })
}

/// Returns the first 4096 bytes of `xsave`.
fn region(xsave: &mut Xsave) -> &mut [u32; 1024] {
    // SAFETY: the length of the structure must not change, and the result gives no access to the length.
    unsafe { &mut xsave.as_mut_fam_struct().xsave.region }
}

/// The complete state of a vCPU.
pub(super) struct VcpuState {
    pub regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: Xsave,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    events: kvm_vcpu_events,
    mp_state: kvm_mp_state,
    msrs: Vec<(u32, u64)>,
    pub serial: Vec<u8>,
}

impl VcpuState {
    /// Reads the state of a vCPU. The vCPU must not run, and no port access may be pending.
    pub fn save(vcpu: &VcpuFd, model: &Model, serial: &[u8]) -> Result<Self, KvmError> {
        // First, because this call makes KVM process pending events.
        let mp_state = vcpu
            .get_mp_state()
            .map_err(KvmError::of("read a vCPU's run state"))?;
        let mut xsave = model.xsave();
        if model.xsave_len > 4096 {
            // SAFETY: `xsave` has this VM's length from KVM_CAP_XSAVE2.
            unsafe { vcpu.get_xsave2(&mut xsave) }
                .map_err(KvmError::of("read a vCPU's vector registers"))?;
        } else {
            let got = vcpu
                .get_xsave()
                .map_err(KvmError::of("read a vCPU's vector registers"))?;
            *region(&mut xsave) = got.region;
        }
        let wanted: Vec<_> = model.msrs.iter().map(|&index| (index, 0)).collect();
        let mut list = msr_list(&wanted).expect("a model has no more MSRs than KVM takes");
        let got = vcpu
            .get_msrs(&mut list)
            .map_err(KvmError::of("read a vCPU's MSRs"))?;
        if got != wanted.len() {
            let index = wanted[got].0;
            let source = std::io::Error::other(format!("MSR {index:#x} was readable before"));
            return Err(KvmError::Kernel {
                action: "read a vCPU's MSRs",
                source,
            });
        }
        Ok(Self {
            mp_state,
            regs: vcpu
                .get_regs()
                .map_err(KvmError::of("read a vCPU's registers"))?,
            sregs: vcpu
                .get_sregs()
                .map_err(KvmError::of("read a vCPU's system registers"))?,
            xsave,
            xcrs: vcpu
                .get_xcrs()
                .map_err(KvmError::of("read a vCPU's XCRs"))?,
            debugregs: vcpu
                .get_debug_regs()
                .map_err(KvmError::of("read a vCPU's breakpoints"))?,
            events: vcpu
                .get_vcpu_events()
                .map_err(KvmError::of("read a vCPU's events"))?,
            msrs: list
                .as_slice()
                .iter()
                .map(|entry| (entry.index, entry.data))
                .collect(),
            serial: serial.to_vec(),
        })
    }

    /// Returns the state as a device.
    pub fn device(&self, instance: u32) -> DeviceState {
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut xsave: Vec<u8> = words(&self.xsave.as_fam_struct_ref().xsave.region);
        xsave.append(&mut words(self.xsave.as_slice()));
        let mut msrs = Vec::with_capacity(self.msrs.len() * 12);
        for (index, value) in &self.msrs {
            msrs.extend_from_slice(&index.to_be_bytes());
            msrs.extend_from_slice(&value.to_be_bytes());
        }
        let mut fields = FieldWriter::default();
        fields.put(REGS, self.regs.to_bytes());
        fields.put(SREGS, self.sregs.to_bytes());
        fields.put(XSAVE, &xsave);
        fields.put(XCRS, self.xcrs.to_bytes());
        fields.put(DEBUGREGS, self.debugregs.to_bytes());
        fields.put(EVENTS, self.events.to_bytes());
        fields.put(MP_STATE, self.mp_state.to_bytes());
        fields.put(MSRS, &msrs);
        fields.put(SERIAL, &self.serial);
        fields.device(VCPU, instance, VCPU_VERSION)
    }

    /// Decodes a device. Checks the sizes; the kernel checks the values in [`VcpuState::load`].
    pub fn parse(payload: &[u8], model: &Model) -> Result<Self, DeviceError> {
        let mut fields = Fields::parse(VCPU, payload)?;
        let bytes = fields.take(XSAVE, "vector registers")?;
        let mut xsave = model.xsave();
        let expected = 4096 + xsave.as_slice().len() * 4;
        if bytes.len() != expected {
            return Err(fields.wrong_length("vector registers", expected, bytes.len()));
        }
        let mut words = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| u32::from_le_bytes(word));
        for (to, word) in region(&mut xsave).iter_mut().zip(words.by_ref().take(1024)) {
            *to = word;
        }
        for (to, word) in xsave.as_mut_slice().iter_mut().zip(words) {
            *to = word;
        }

        let bytes = fields.take(MSRS, "MSRs")?;
        let (entries, rest) = bytes.as_chunks::<12>();
        if !rest.is_empty() || entries.len() > MAX_MSRS {
            let expected = entries.len().min(MAX_MSRS) * 12;
            return Err(fields.wrong_length("MSRs", expected, bytes.len()));
        }
        let msrs = entries
            .iter()
            .map(|entry| {
                let (index, value) = entry.split_at(4);
                let number = |bytes: &[u8]| {
                    bytes
                        .iter()
                        .fold(0, |so_far, &b| so_far << 8 | u64::from(b))
                };
                (crate::bytes::low_u32(number(index)), number(value))
            })
            .collect();

        let serial = fields.take(SERIAL, "serial line")?;
        if serial.len() > MAX_LINE {
            return Err(fields.wrong_length("serial line", MAX_LINE, serial.len()));
        }
        let state = Self {
            regs: Plain::from_bytes(&mut fields, REGS, "registers")?,
            sregs: Plain::from_bytes(&mut fields, SREGS, "system registers")?,
            xsave,
            xcrs: Plain::from_bytes(&mut fields, XCRS, "XCRs")?,
            debugregs: Plain::from_bytes(&mut fields, DEBUGREGS, "breakpoints")?,
            events: Plain::from_bytes(&mut fields, EVENTS, "events")?,
            mp_state: Plain::from_bytes(&mut fields, MP_STATE, "run state")?,
            msrs,
            serial: serial.to_vec(),
        };
        fields.finish()?;
        Ok(state)
    }

    /// Loads the state into a vCPU. The vCPU's VM must have the same [`Model`] (MSRs, size of the XSAVE area) as the
    /// source.
    pub fn load(&self, fd: &VcpuFd, vcpu: u8, model: &Model) -> Result<(), DeviceError> {
        let refused = |action| {
            move |error: kvm_ioctls::Error| DeviceError::Kernel {
                vcpu,
                action,
                source: error.into(),
            }
        };
        // System registers first: their mode restricts the values of all others.
        fd.set_sregs(&self.sregs)
            .map_err(refused("take its system registers"))?;
        fd.set_regs(&self.regs)
            .map_err(refused("take its registers"))?;
        fd.set_xcrs(&self.xcrs).map_err(refused("take its XCRs"))?;
        // SAFETY: `xsave` has this VM's length from KVM_CAP_XSAVE2 (`Model::xsave`).
        unsafe { fd.set_xsave2(&self.xsave) }.map_err(refused("take its vector registers"))?;
        fd.set_debug_regs(&self.debugregs)
            .map_err(refused("take its breakpoints"))?;
        for &(index, value) in &self.msrs {
            let taken = fd
                .set_msrs(&msr_list(&[(index, value)])?)
                .is_ok_and(|set| set == 1);
            // An MSR that this host lacks does not matter if the guest never set it.
            if !taken && (value != 0 || model.msrs.contains(&index)) {
                return Err(DeviceError::Msr { vcpu, index, value });
            }
        }
        fd.set_vcpu_events(&self.events)
            .map_err(refused("take its events"))?;
        fd.set_mp_state(self.mp_state)
            .map_err(refused("take its run state"))
    }
}
