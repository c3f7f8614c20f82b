//! The VM of a KVM guest: its memory slot, the creation of its vCPUs, and checks of KVM's capabilities.

use hotlift_mem::RamBlock;
use kvm_bindings::{
    KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

use super::error::KvmError;
use super::state::Model;
use crate::bytes::{to_u64, to_usize};

/// Number of the memory slot for all RAM, which starts at guest-physical address 0. Without firmware, interrupt
/// controller or memory-mapped devices, no hole below 4 GiB is needed.
pub(super) const SLOT: u32 = 0;

/// Version of the KVM interface (`KVM_API_VERSION`), the only one that exists.
const API_VERSION: i32 = 12;
const _: () = assert!(KVM_API_VERSION == 12);

/// Opens /dev/kvm and checks the required capabilities.
fn open() -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(|error| KvmError::Open(error.into()))?;
    let got = kvm.get_api_version();
    if got != API_VERSION {
        return Err(KvmError::ApiVersion {
            expected: API_VERSION,
            got,
        });
    }
    for (cap, capability) in [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::MpState, "KVM_CAP_MP_STATE"),
        (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
        (Cap::Debugregs, "KVM_CAP_DEBUGREGS"),
        (Cap::Xcrs, "KVM_CAP_XCRS"),
    ] {
        if !kvm.check_extension(cap) {
            return Err(KvmError::Capability { capability });
        }
    }
    Ok(kvm)
}

/// Checks that a VM with a vCPU can be created.
///
/// # Errors
/// The reason why no VM can be created.
pub fn usable() -> Result<(), KvmError> {
    let vm = open()?.create_vm().map_err(KvmError::of("create a VM"))?;
    vm.create_vcpu(0).map_err(KvmError::of("create a vCPU"))?;
    Ok(())
}

/// Creates a VM and its vCPUs. The vCPUs have not run.
pub(super) fn create(vcpus: u8) -> Result<(VmFd, Vec<VcpuFd>, Model), KvmError> {
    let kvm = open()?;
    let vm = kvm.create_vm().map_err(KvmError::of("create a VM"))?;
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(KvmError::of("list the features of its vCPUs"))?;
    let vcpus = (0..vcpus)
        .map(|index| {
            let vcpu = vm
                .create_vcpu(u64::from(index))
                .map_err(KvmError::of("create a vCPU"))?;
            vcpu.set_cpuid2(&cpuid)
                .map_err(KvmError::of("set the features of a vCPU"))?;
            Ok(vcpu)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let listed = kvm
        .get_msr_index_list()
        .map_err(KvmError::of("list its MSRs"))?;
    let xsave_len = usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0);
    let model = Model::new(&vcpus[0], xsave_len, listed.as_slice());
    Ok((vm, vcpus, model))
}

/// Maps `ram` at guest-physical address 0, with a dirty log if `log` is true. Can be called again to change `log`.
pub(super) fn map(vm: &VmFd, ram: &RamBlock, log: bool) -> Result<(), KvmError> {
    let region = kvm_userspace_memory_region {
        slot: SLOT,
        flags: if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr: 0,
        memory_size: to_u64(ram.len()),
        userspace_addr: to_u64(ram.host_addr().addr()),
    };
    // SAFETY: the range is the block's whole mapping. Every owner of the VM also owns the block (see `Machine`), so the
    // range stays mapped. It is accessed only as guest-writable memory.
    unsafe { vm.set_user_memory_region(region) }.map_err(KvmError::of("map guest RAM"))
}

/// Returns the TSC frequency of a vCPU in kHz. If KVM reports no frequency, returns a guess (2 GHz), which only affects
/// the rate of writes.
pub(super) fn tsc_khz(vcpu: &VcpuFd) -> u32 {
    vcpu.get_tsc_khz()
        .ok()
        .filter(|&khz| khz > 0)
        .unwrap_or(2_000_000)
}

/// Returns the TSC frequency of this host's vCPUs in kHz, for another VMM that runs the guest program.
///
/// # Errors
/// If KVM cannot be used.
pub fn host_tsc_khz() -> Result<u32, KvmError> {
    let (_vm, vcpus, _) = create(1)?;
    Ok(vcpus.first().map_or(0, tsc_khz))
}

/// Reads one u64 of RAM, for display only; returns 0 outside RAM.
pub(super) fn peek(ram: &RamBlock, offset: u64) -> u64 {
    ram.load_u64(to_usize(offset)).unwrap_or(0)
}
