//! KVM's dirty log of the single memory slot.
//!
//! With `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` a fetch changes nothing. `KVM_CLEAR_DIRTY_LOG` clears the bits of a range
//! and write-protects its pages, just before these pages are read. There are two advantages:
//!
//! - The time in which a fetched page is written and sent again is shorter.
//! - The cost of write protection is spread over the round.
//!
//! The log starts with every bit set (`INITIALLY_SET`), so enabling it write-protects nothing: the first round clears
//! each range before reading it. Older kernels fetch and clear at once.

use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLockReadGuard};

use hotlift_mem::{DirtyBitmap, RamBlock};
use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVMIO, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1, kvm_enable_cap,
};
use kvm_ioctls::VmFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iowr_nr;

use super::error::KvmError;
use super::vm::SLOT;
use crate::bytes::{low_u32, to_u64};

ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);

/// The dirty log of one memory slot.
pub(super) struct DirtyLog {
    manual: bool,
    /// Bits that were fetched from KVM, but not yet cleared there. No other bit may be cleared in KVM: it was set
    /// later, by a write that no fetch has returned.
    fetched: RwLock<Vec<AtomicU64>>,
}

impl DirtyLog {
    /// Enables the VM's mode of dirty logging. Must be called before the slot starts to log.
    pub fn new(vm: &VmFd, pages: usize) -> Result<Self, KvmError> {
        let capability = u64::from(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2);
        let known = vm.check_extension_raw(capability);
        let wanted = KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET;
        let offered = u32::try_from(known).unwrap_or(0) & wanted;
        let manual = offered & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE != 0;
        if manual {
            let mut cap = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                ..Default::default()
            };
            cap.args[0] = u64::from(offered);
            vm.enable_cap(&cap)
                .map_err(KvmError::of("turn on manual dirty log protection"))?;
        }
        let fetched = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self {
            manual,
            fetched: RwLock::new(fetched),
        })
    }

    /// Must be called when the slot has started to log.
    pub fn started(&self, ram: &RamBlock) {
        // The first round reads all pages without a fetch, so it must clear all bits.
        let fetched = self.fetched();
        for (index, word) in fetched.iter().enumerate() {
            let pages = (ram.pages() - index * 64).min(64);
            word.store(u64::MAX >> (64 - pages), Ordering::Release);
        }
    }

    /// Fetches the log into `into`, and returns the number of bits that `into` did not have before.
    pub fn sync(&self, vm: &VmFd, ram: &RamBlock, into: &DirtyBitmap) -> Result<u64, KvmError> {
        // No thread may clear bits during a fetch. A thread with an older fetch could clear a bit that this fetch
        // returns. If the guest then writes the page, KVM sets the bit again, and the next clear would lose that write.
        let fetched = self.fetched.write().unwrap_or_else(PoisonError::into_inner);
        let words = vm
            .get_dirty_log(SLOT, ram.len())
            .map_err(KvmError::of("fetch the dirty log"))?;
        if self.manual {
            for (saved, &word) in fetched.iter().zip(&words) {
                saved.store(word, Ordering::Release);
            }
        }
        Ok(into.or_words(0, &words))
    }

    /// Clears the fetched bits of `pages` pages from page `first` on, a multiple of 64.
    pub fn clear(
        &self,
        vm: &VmFd,
        ram: &RamBlock,
        first: usize,
        pages: usize,
    ) -> Result<(), KvmError> {
        if !self.manual || first >= ram.pages() {
            return Ok(());
        }
        let end = first.saturating_add(pages).min(ram.pages());
        let words = self.fetched();
        let mut taken: Vec<u64> = words[first / 64..end.div_ceil(64)]
            .iter()
            .enumerate()
            .map(|(index, word)| {
                let asked = (end - first - index * 64).min(64);
                let mask = u64::MAX >> (64 - asked);
                word.fetch_and(!mask, Ordering::AcqRel) & mask
            })
            .collect();
        if taken.iter().all(|&word| word == 0) {
            return Ok(());
        }
        // KVM requires whole words, except at the end of the slot. Bits outside the range are zero in these words.
        let whole = (taken.len() * 64).min(ram.pages() - first);
        let request = kvm_clear_dirty_log {
            slot: SLOT,
            num_pages: low_u32(to_u64(whole)),
            first_page: to_u64(first),
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 {
                dirty_bitmap: taken.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the request names a bitmap of `taken.len()` words, which covers `num_pages` bits and
        // lives until the call returns; KVM only reads it. The fd is a VM's.
        let result = unsafe { ioctl_with_ref(vm, KVM_CLEAR_DIRTY_LOG(), &request) };
        if result < 0 {
            let source = std::io::Error::last_os_error();
            return Err(KvmError::Kernel {
                action: "clear the dirty log",
                source,
            });
        }
        Ok(())
    }

    fn fetched(&self) -> RwLockReadGuard<'_, Vec<AtomicU64>> {
        self.fetched.read().unwrap_or_else(PoisonError::into_inner)
    }
}
